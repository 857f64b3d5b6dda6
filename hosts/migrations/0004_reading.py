from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("hosts", "0003_collector"),
    ]

    operations = [
        migrations.CreateModel(
            name="Reading",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("root_key", models.CharField(max_length=200)),
                ("until", models.DateTimeField()),
            ],
        ),
    ]
