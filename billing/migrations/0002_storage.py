from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("billing", "0001_initial"),
    ]

    operations = [
        migrations.AlterField(
            model_name="meterinterval",
            name="meter",
            field=models.CharField(
                choices=[
                    ("memory", "configured memory, in MiB"),
                    ("storage", "stored data, in bytes"),
                ],
                max_length=10,
            ),
        ),
    ]
